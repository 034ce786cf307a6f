"""Lists, replays and discards the events that pools have set aside in a stream of dead letters."""
