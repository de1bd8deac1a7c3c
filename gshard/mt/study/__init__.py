"""`gshard study`: many runs planned in one file, trained one after another, compared at the end."""
