"""From per-device programs to executables on global arrays: ports, programs, stages."""
