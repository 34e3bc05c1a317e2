"""What is said about a name that is not known."""

from realhf.base.text import close_to


def test_a_close_spelling_is_offered_and_the_names_are_listed():
    assert close_to("gree", ["green", "blue"]) == "; did you mean 'green'? (known: green, blue)"
    assert close_to("zzz", []) == " (known: none)"


def test_a_long_list_is_cut_and_counted():
    said = close_to("zzz", [f"name{i}" for i in range(25)])
    assert "name19, and 5 more)" in said and "name20" not in said
