"""Programs written anew where a pattern of the user's is cheaper in another form."""
