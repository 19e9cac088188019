"""`iskander top`: samples of a server, and the screen that shows them."""
