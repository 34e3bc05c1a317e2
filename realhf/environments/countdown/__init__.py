"""Countdown: reach a number by arithmetic on given numbers, judged by a verifier that is a pure function."""

from realhf.environments.countdown.definition import DEFINITION as DEFINITION
