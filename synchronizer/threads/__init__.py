"""Background threads and what threads wait with, safe against interrupts."""
