import pytest

from palestra.agents.tools.schema import parse_docstring

GOOGLE = """Look a price up.

    Prices are in euro.

    Args:
        item (str): The item's name,
            as the catalogue has it.
        count: How many. Default: one.

    Returns:
        The price.
    """
NUMPY = """Look a price up.

    Prices are in euro.

    Parameters
    ----------
    item : str
        The item's name,
        as the catalogue has it.
    count : int, optional
        How many. Default: one.

    Returns
    -------
    float
        The price.
    """
SPHINX = """Look a price up.

    Prices are in euro.

    :param str item: The item's name,
        as the catalogue has it.
    :param count: How many. Default: one.
    :type count: int
    :returns: The price.
    """


@pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, SPHINX], ids=["google", "numpy", "sphinx"])
def test_three_styles_say_the_same(docstring):
    description, parameters = parse_docstring(docstring)
    assert description == "Look a price up.\n\nPrices are in euro."
    assert parameters == {
        "item": "The item's name, as the catalogue has it.",
        "count": "How many. Default: one.",
    }


def test_a_docstring_without_sections_is_all_description():
    assert parse_docstring("Say hello. Note: politely.") == ("Say hello. Note: politely.", {})


def test_numpy_names_that_share_a_line_share_their_text():
    assert parse_docstring("Add.\n\nParameters\n----------\na, b : int\n    A number.")[1] == {
        "a": "A number.",
        "b": "A number.",
    }


def test_text_of_other_sections_is_no_parameter():
    text = "Divide.\n\nArgs:\n    a: Above.\n\nRaises:\n    ValueError: Below is zero."
    assert parse_docstring(text) == ("Divide.", {"a": "Above."})


def test_a_parameter_named_like_a_section_stays_a_parameter():
    text = "Write.\n\nArgs:\n    note: What to write.\n    returns: Whether to answer."
    assert parse_docstring(text)[1] == {"note": "What to write.", "returns": "Whether to answer."}
