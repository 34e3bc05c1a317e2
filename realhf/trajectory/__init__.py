"""Trajectory server: a durable, Atropos-compatible buffer between environments and trainers.

Vocabulary (docs/reference/trajectory.md 1): a *sequence* is one trajectory; a *group* is one pushed
object of n sequences and is never split; a *batch* is a list of groups whose sizes sum to exactly
``batch_size`` sequences; the *mix buffer* holds groups whose size is not the environment's
``group_size``; a *step* counts batches handed out; an *epoch* counts resets.
"""
