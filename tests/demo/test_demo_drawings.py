"""The generator of drawings: what it promises to training, evaluation and the model's users."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from ostinato.demo.asking import SCENE_FAMILIES, WORDINGS, ask
from ostinato.demo.canvas import MOTIONS, SHADES, Clip, draw, draw_clip
from ostinato.demo.drawings import (
    FAMILIES,
    Conversation,
    Source,
    draw_scene,
    held_out,
    is_held_out,
    is_right,
    training_conversation,
)
from ostinato.demo.scenes import COLOURS, KINDS, PLACES, Scene, arrange, content, describe

ANY = Source(lambda _: True)


def training_conversations(count: int, seed: int = 0) -> list[Conversation]:
    rng = random.Random(seed)
    return [training_conversation(rng) for _ in range(count)]


def shown(conversations: list[Conversation]) -> list[Scene | Clip]:
    return [item for conversation in conversations for turn in conversation for item in turn.shown]


def scenes(count: int, seed: int = 0) -> list[Scene]:
    rng = random.Random(seed)
    return [draw_scene(rng, ANY) for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_draws_the_same_conversations_and_another_seed_others(family: str):
    assert held_out(3, 20, family) == held_out(3, 20, family)
    assert held_out(3, 20, family) != held_out(4, 20, family)
    assert held_out(3, 20, family)[:5] == held_out(3, 5, family)


def test_the_same_scene_gives_the_same_pixels_and_another_grain_others():
    first = scenes(1)[0]
    other = Scene(first.width, first.height, first.background, first.shapes, first.layout, first.grain + 1)
    assert draw(first).tobytes() == draw(first).tobytes()
    assert draw(first).tobytes() != draw(other).tobytes()


@pytest.mark.slow
def test_training_never_draws_what_is_held_out_and_evaluation_draws_nothing_else():
    assert not any(is_held_out(item.content) for item in shown(training_conversations(3000)))
    for family in FAMILIES:
        assert all(is_held_out(item.content) for item in shown(held_out(0, 100, family)))


def test_about_one_drawing_in_eight_is_held_out_of_one_shape_and_of_two():
    names = [f"{colour} {kind}" for colour in COLOURS for kind in KINDS]
    ones = [content([name], layout) for name in names for layout in PLACES]
    pairs = [content([a, b], "above") for a in names for b in names if a != b]
    for contents in (ones, pairs):
        assert len(set(contents)) == len(contents)
        assert 0.09 < sum(map(is_held_out, contents)) / len(contents) < 0.16


def test_a_description_names_the_upper_and_the_left_shape_first():
    for scene in scenes(500):
        if len(scene.shapes) > 1:
            positions = [shape.y if scene.layout == "above" else shape.x for shape in scene.shapes]
            assert positions == sorted(positions)
            assert scene.description.count(f" {scene.layout} ") == len(scene.shapes) - 1
    assert describe(["red circle", "blue square"], "above") == "a red circle above a blue square"
    assert describe(["orange star"], "in the middle") == "an orange star"


def test_shapes_are_whole_and_apart():
    for scene in scenes(500):
        short = min(scene.width, scene.height)
        for shape in scene.shapes:
            assert shape.radius * short <= shape.x * scene.width + 1e-6
            assert shape.y * scene.height + shape.radius * short <= scene.height + 1e-6
        for index, a in enumerate(scene.shapes):
            for b in scene.shapes[index + 1 :]:
                distance = np.hypot((a.x - b.x) * scene.width, (a.y - b.y) * scene.height)
                assert distance > (a.radius + b.radius) * short


def test_a_single_shape_lies_where_its_layout_says():
    rng = random.Random(0)
    for layout, (column, row) in PLACES.items():
        shape = arrange(rng, ["red circle"], layout).shapes[0]
        assert (round((shape.x - 0.5) / 0.24), round((shape.y - 0.5) / 0.24)) == (column, row)


def test_the_middle_of_a_shape_has_its_colour_and_a_corner_the_background():
    rng = random.Random(0)
    for colour in COLOURS:
        for kind in KINDS:
            scene = arrange(rng, [f"{colour} {kind}"], "in the middle")
            pixels = np.asarray(draw(scene), np.float32)
            shape = scene.shapes[0]
            at = pixels[round(shape.y * scene.height), round(shape.x * scene.width)]
            saturated = (at.max() - at.min()) / at.max()
            assert saturated > SHADES[colour][1][0] - 0.25, (colour, kind)
            corner = pixels[:4, :4].mean((0, 1))
            assert corner.max() - corner.min() < 12
            assert {"white": 210, "grey": 90, "black": -1}[scene.background] < corner.mean()
            assert corner.mean() < {"white": 256, "grey": 180, "black": 50}[scene.background]


def test_kinds_are_drawn_differently_and_within_their_circle():
    masks = []
    for kind in KINDS:
        scene = arrange(random.Random(1), [f"red {kind}"], "in the middle")
        pixels = np.asarray(draw(scene), np.float32)
        masks.append((pixels[..., 0] - pixels[..., 1]) > 100)
        rows, columns = np.nonzero(masks[-1])
        radius = scene.shapes[0].radius * min(scene.width, scene.height)
        assert max(np.ptp(rows), np.ptp(columns)) <= 2 * radius + 2
    for index, mask in enumerate(masks):
        for other in masks[index + 1 :]:
            assert (mask ^ other).sum() > 0.2 * mask.sum()


def test_pictures_have_many_sizes_and_both_orientations():
    sizes = [(scene.width, scene.height) for scene in scenes(300)]
    assert len(set(sizes)) > 250
    assert 0.3 < sum(width > height for width, height in sizes) / 300 < 0.7
    assert max(max(size) for size in sizes) > 400


@pytest.mark.parametrize("motion", MOTIONS)
def test_a_clip_moves_its_shape_as_it_says(motion: str):
    clip = draw_clip(random.Random(2), "red circle", motion)
    frames = [np.asarray(frame, np.float32) for frame in clip.frames()]
    centres = [np.argwhere((frame[..., 0] - frame[..., 1]) > 90).mean(0)[::-1] for frame in frames]
    moved = (centres[-1] - centres[0]) / frames[0].shape[1]
    assert np.allclose(moved, np.array(MOTIONS[motion]) * np.abs(clip.way).sum(), atol=0.04)
    assert clip.description == ("a red circle stands still" if not motion else f"a red circle moves {motion}")
    assert len(frames) == clip.count


def test_every_question_has_its_answer_in_the_scene():
    for conversation in training_conversations(2000):
        for turn in conversation:
            question = turn.question
            assert question.answer == question.answer.strip().lower()
            if question.family == "count" and turn.shown:
                assert question.answer == ("one", "two", "three")[len(turn.shown[0].shapes) - 1]
            if question.family == "exists" and turn.shown:
                asked = any(shape.name in question.text.lower() for shape in turn.shown[0].shapes)
                assert question.answer == ("yes" if asked else "no")
            if question.family in ("describe", "motion") and turn.shown:
                assert question.answer == turn.shown[0].description


@pytest.mark.slow
def test_every_kind_of_question_and_conversation_is_in_training():
    conversations = training_conversations(4000)
    asked = Counter(turn.question.family for conversation in conversations for turn in conversation)
    assert asked.keys() == WORDINGS.keys()
    assert min(asked.values()) > 50
    assert sum(len(conversation) > 1 for conversation in conversations) > 1000
    assert any(len(turn.shown) == 2 for conversation in conversations for turn in conversation)
    assert any(turn.shown for conversation in conversations for turn in conversation[1:])


@pytest.mark.slow
def test_yes_and_no_are_about_as_often_right():
    answers = Counter(
        turn.question.answer
        for conversation in training_conversations(4000)
        for turn in conversation
        if turn.question.family in ("exists", "relation", "same")
    )
    assert answers.keys() == {"yes", "no"}
    assert 0.42 < answers["yes"] / answers.total() < 0.58


def test_an_answer_is_right_whatever_its_case_and_last_sign():
    turn = held_out(0, 1)[0][0]
    answer = turn.question.answer
    assert is_right(answer, turn)
    assert is_right(f" {answer.capitalize()}.", turn)
    assert not is_right(f"not {answer}", turn)
    assert not is_right("", turn)


def test_a_scene_that_no_family_fits_that_is_left_is_described() -> None:
    scene = next(scene for scene in scenes(100) if len(scene.shapes) == 1)
    assert ask(random.Random(0), scene, SCENE_FAMILIES.keys() - {"bigger"}).family == "describe"
