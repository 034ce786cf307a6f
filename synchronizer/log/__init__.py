"""The log of typed updates of a shared state: its entries, the replica that each process keeps, and the writer."""
