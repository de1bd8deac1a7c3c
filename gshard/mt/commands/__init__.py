"""The subcommands of `gshard` that belong to translation, one small module each."""
