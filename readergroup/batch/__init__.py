"""Reading streams in bulk: ranges between two cuts, in any order and in as many processes as one likes."""
