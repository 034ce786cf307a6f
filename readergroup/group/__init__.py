"""Reader groups: the group, its readers, and the driver that renews their leases."""
