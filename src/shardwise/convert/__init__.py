"""A checkpoint written anew, in our format or a foreign one, in bounded memory."""
