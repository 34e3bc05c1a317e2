"""Plays against the grader with scripts: what does nothing, what is beside the point, what harms, what is overdone, and
other right ways. ``collection.plays_of`` gives those of a task; ``python -m realhf.aws.tasks validate --adversarial``
plays them."""
