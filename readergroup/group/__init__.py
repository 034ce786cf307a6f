"""Reader groups: the group, its readers, and what keeps them alive."""
