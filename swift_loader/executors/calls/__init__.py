"""Does tasks that call a function of the user's: in threads or on an event loop of this process."""
