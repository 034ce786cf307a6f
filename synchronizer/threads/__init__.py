"""Background threads, and events that threads wait for, safe against interrupts."""
