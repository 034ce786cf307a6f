"""What a group's notifiers told, kept in the store: written once per change, read by revision."""
