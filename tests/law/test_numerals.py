import pytest

from xmod_jax.law import numerals


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2.7", 2.7),
        ("-1.5e-3", -1.5e-3),
        ("2,7", 2.7),
        ("1,5E+20", 1.5e20),
        ("1,500e20", 1.5e20),
        ("2,048", 2.048),
        ("2.048", 2.048),
        ("0,123", 0.123),
        ("1,234.5", 1234.5),
        ("1.234,5", 1234.5),
        ("1.234.567", 1234567),
        ("1,234,567", 1234567),
        ("556 000 000", 556e6),
        ("1\u00a0000,5", 1000.5),
        ("1'000", 1000),
    ],
)
def test_numbers_as_people_write_them(text, value):
    assert numerals.number(text, whole=False) == value


def test_a_comma_before_three_digits_parts_thousands_of_what_is_counted():
    assert numerals.number("2,048", whole=True) == 2048
    assert numerals.number("0,250", whole=True) == 0.25
    assert numerals.number("2,5", whole=True) == 2.5


def test_a_point_before_three_digits_parts_thousands_only_beside_decimal_commas():
    assert numerals.number("2.048", whole=True) == 2.048
    assert numerals.number("2.048", whole=True, decimal_commas=True) == 2048
    assert numerals.number("2.048", whole=False, decimal_commas=True) == 2.048
    assert numerals.decimal_commas(["2.048", "2,7", "8"])
    assert not numerals.decimal_commas(["2.048", "2,7", "1.5e20"])
    assert not numerals.decimal_commas(["2.048", "2,048"])


@pytest.mark.parametrize("text", ["", "two", "1,2,3", "1.2.3", "12,34.5", "1,2.3,4", "10%", "5 6"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(ValueError, match=r"number|float"):
        numerals.number(text, whole=True)
