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


# Pairs of the MATH benchmark's own tests, by the rules of its is_equiv.
MATH = [
    ("10, 4, -2", "4, 10, -2", False),
    ("10, 4, 2", "4, 2, 10", False),
    ("\\tfrac{1}{2} + \\frac1{72}", "\\\\dfrac{1}{2} + 2/3", False),
    ("\\tfrac{1}{2} +\\! \\frac1{72}", "\\\\dfrac{1}{2} +\\frac{1}{72}", True),
    ("10\\text{ units}", "10 ", True),
    ("10\\text{ units}", "100 ", False),
    ("10", "\\$10", True),
    ("\\left(x-2\\right)\\left(x+2\\right)", "(x-2)(x+2)", True),
    ("0.1, 4, 2", "4, .1, 2", False),
    ("0.1", ".1", True),
    ("10\\%", "10", True),
    ("10\\sqrt{3} + \\sqrt4", "10\\sqrt3 + \\sqrt{4}", True),
    ("\\frac34i", "\\frac{3}{4}i", True),
    ("\\tfrac83", "\\frac{8}{3}", True),
    ("5x - 7y + 11z + 4 = 0", "x + y - z + 2 = 0", False),
    ("1/2", "\\frac{1}{2}", True),
    ("0.5", "\\frac12", True),
    ("x=5", "5", True),
    ("x = 5", "5", True),
    ("\\frac1{72}", "\\frac{1}{72}", True),
    ("90^{\\circ}", "90", True),
]


@pytest.mark.parametrize(("text", "target", "right"), MATH)
def test_formulas_of_the_published_vectors(text, target, right):
    assert is_correct("formula", text, target) is right
    assert is_correct("formula", f"The answer is ${text}$.", target) is right
    assert is_correct("formula", f"So\n\\boxed{{{text}}}", f"${target}$") is right


def test_the_published_vectors_are_those_of_the_harness():
    utils = pytest.importorskip("lm_eval.tasks.hendrycks_math.utils")
    assert [utils.is_equiv(text, target) for text, target, _ in MATH] == [r for *_, r in MATH]


@pytest.mark.parametrize(
    ("text", "target", "right"),
    [
        # every formula counts, not only the first
        ("$x = 1$ and $y = 2$", "$x = 1$ and $y = 2$", True),
        ("$x = 1$ and $y = 3$", "$x = 1$ and $y = 2$", False),
        ("The answer is $4$ or $5$.", "4 or 5", True),
        # the left side of an equation counts unless it is one name that the other side lacks
        ("x + y = 5", "5", False),
        ("2x = 4", "4", False),
        ("x + y = 5", "x - y = 5", False),
        ("y = 5", "x = 5", False),
        ("y = 2x + 1", "y = 2x + 1", True),
        ("\\theta_1 = 3", "3", True),
        # the last box, with the braces in it
        ("\\boxed{1}, no: $\\boxed{\\frac{1}{2}}$", "\\frac12", True),
        ("First,\nthe box is $\\boxed 7$.", "7", True),
        ("Final Answer: The final answer is $[2,5)$. I hope it is correct.", "[2,5)", True),
        # a text between formulas is no unit
        ("4\\text{ and }5", "4\\text{ and }6", False),
        ("4\\text{ cm}^2.", "4", True),
        # commas of a list are no separators of thousands
        ("(1,234)", "(1234)", False),
        ("1,234.5", "1234.5", True),
    ],
)
def test_formulas_are_compared_whole(text, target, right):
    assert is_correct("formula", text, target) is right
