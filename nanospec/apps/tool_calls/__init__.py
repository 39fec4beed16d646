"""Tool calls: the functions that a request offers, and the parser and grammar of each format of calls."""
