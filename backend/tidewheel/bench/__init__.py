"""`tidewheel bench`: equal requests to any number of targets, timed by the client."""
