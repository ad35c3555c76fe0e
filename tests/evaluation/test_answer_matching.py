"""Matching of generated text with the target answer."""

from __future__ import annotations

import pytest

from mindspeed.evaluation.answer_matching import is_correct, normal_formula


@pytest.mark.parametrize(
    ("score", "text", "target", "right"),
    [
        ("yes_or_no", " Yes", "Yes", True),
        ("yes_or_no", "\n**no**, since", "No", True),
        ("yes_or_no", " Yesterday", "Yes", False),
        ("yes_or_no", "", "Yes", False),
        ("letter", " B", "B", True),
        ("letter", "The answer is (C).", "C", True),
        ("letter", "Apples. The answer is: D", "D", True),
        ("letter", " Because of A", "A", True),
        ("letter", "|", "A", False),
        ("letter", " Beta", "B", False),
        ("letter", "B or C", "C", False),
        ("letters", "A, C", "CA", True),
        ("letters", "CA", "AC", True),
        ("letters", "A", "AC", False),
        ("letters", "ABC", "AC", False),
        ("letters", "A and B", "A", True),
        ("number", "5 + 7 = 12. The answer is 12.", "12", True),
        ("number", "The answer is $1,234.00.\nQ: 7?", "1234", True),
        ("number", "The answer is 3 * 4 = 12", "12", True),
        ("number", "first 3, then 12", "12", True),
        ("number", "The answer is 5. The answer is 6.", "6", True),
        ("number", "The answer is -0.5%", "-.5", True),
        ("number", "The answer is 13", "12", False),
        ("number", "none", "12", False),
        ("first_line", " (A)\nQ: next", "(A)", True),
        ("first_line", "\n\n True ", "True", True),
        ("first_line", "(A) since", "(A)", False),
        ("conclusion", "Hm.\nSo the answer is no.", "no", True),
        ("conclusion", "the answer is yes. No, the answer is no.", "yes", False),
        ("conclusion", "valid", "valid", True),
        ("formula", " $\\frac12$.", "\\dfrac{1}{2}", True),
        ("formula", "x = 0.5", "\\frac{1}{2}", True),
        ("formula", "\\boxed{3\\sqrt2}", "3\\sqrt{2}", True),
        ("formula", "1,000", "1000", True),
        ("formula", "(1, 2)", "(1,2)", True),
        ("formula", "90^\\circ", "90", True),
        ("formula", "3/4", "\\frac{3}{4}", True),
        ("formula", "-\\frac{3}{4}", "-0.75", True),
        ("formula", "7", "8", False),
        ("formula", "\\frac{1}{0}", "0", False),
        ("formula", "", "", False),
    ],
)
def test_answer_matching(score, text, target, right):
    assert is_correct(score, text, target) is right


def test_equivalent_formulas_match():
    spellings = ["$\\left( 2 , 3 \\right)$", "(2,\\;3)", "(2,3).", "\\boxed{(2,3)}"]
    assert {normal_formula(text) for text in spellings} == {"(2,3)"}
