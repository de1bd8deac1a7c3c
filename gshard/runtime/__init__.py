"""Between global arrays and what each device runs: ports, executables, stages."""
