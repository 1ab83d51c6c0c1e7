"""Files of requests answered as the server would answer them."""
