"""Changes what an episode did in ways that should change what it is worth: for proving a reward by mutation."""
