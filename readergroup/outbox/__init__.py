"""Events that exist if and only if a transaction of the user's database commits."""
