"""Credit: by token, segment and tree."""
