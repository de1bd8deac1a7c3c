"""Held-out sentences are found in the training text whatever their case, digits and punctuation."""

import pytest

from benchmarks.contamination import folded, shared


@pytest.mark.parametrize("text", ["Save file 1?", "  SAVE «file» ", "save-file…", "save file 22"])
def test_spellings_of_one_sentence_are_one(text):
    assert folded(text) == "save file"


def test_letters_and_marks_are_kept():
    assert folded("Größe der क्षेत्र") == "grösse der क्षेत्र"
    assert folded("a b") != folded("ab")


def test_held_out_sentences_of_the_training_text_are_counted():
    assert shared(["Open it.", "Close it"], ["open IT (2)", "leave"]) == 1
