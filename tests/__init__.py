"""Tests of meshmpi; `tests.oracle` says what is right."""
