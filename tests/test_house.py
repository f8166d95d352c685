"""The house's measures count what they say, and today's limits hold (``python -m tests.house`` prints them)."""

from house import LIMITS, broken, circles, empty_names, lines, long_functions


def test_lines_without_blanks_comments_and_docstrings() -> None:
    text = '"""Said."""\n\n# why\nx = """\nkept\n"""  # beside\n\n\ndef f():\n    """Said."""\n    return x\n'
    assert lines(text) == (5, 1)


def test_a_circle_is_found_wherever_the_import_stands() -> None:
    lazy = "def f():\n    from fedflat import c"
    checked = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fedflat.a"
    files = {"fedflat": "", "fedflat.a": "import fedflat.b", "fedflat.b": lazy, "fedflat.c": checked, "fedflat.d": ""}
    assert circles(files) == [["fedflat.a", "fedflat.b", "fedflat.c"]]
    assert circles(files | {"fedflat.b": ""}) == []


def test_a_long_function_is_found() -> None:
    body = "    x = 1\n"
    assert long_functions("def f():\n" + 39 * body) == 0 and long_functions("def f():\n" + 40 * body) == 1
    assert long_functions("def f():\n    'said'\n" + 39 * body) == 0


def test_names_that_say_nothing_are_counted_as_variables_and_arguments() -> None:
    text = "def f(found, data):\n    for each in found:\n        own = each.own\n    return wrong(found=own)\n"
    assert empty_names(text) == 3


def test_a_worse_measure_is_broken() -> None:
    for name, limit in LIMITS.items():
        step = -0.01 if limit.least else 1
        assert not broken(name, limit.today) and broken(name, limit.today + step)
