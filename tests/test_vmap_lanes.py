"""What is behind a lane of `torch.vmap`, wherever its axis is, and what one lane sees of it."""

import pytest
import torch

from pflmpi.vmap_lanes import behind, in_lane, in_lanes_of, in_vmap, lane_axis, of_all_lanes, outside_vmap

VALUES = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_values_of_all_lanes_have_the_lanes_first(axis):
    gathered = []

    def one_lane(lane):
        assert in_vmap() and in_lane(lane) and lane_axis(lane) == axis
        assert behind(lane) is not lane
        with outside_vmap():
            gathered.append(of_all_lanes(lane))
        assert not in_lane(gathered[0])
        return in_lanes_of(gathered[0], lane) + lane

    shown = torch.vmap(one_lane, in_dims=axis)(VALUES)
    assert torch.equal(gathered[0], VALUES.movedim(axis, 0))
    assert torch.equal(shown, 2 * VALUES.movedim(axis, 0)), "each lane has its own values"
    assert not in_vmap()


def test_what_a_gradient_is_taken_of_is_found_behind_it():
    gathered = []

    def loss(lane):
        with outside_vmap(), torch.no_grad():
            gathered.append(of_all_lanes(lane).clone())
        return lane.square().sum()

    slopes = torch.vmap(torch.func.grad(loss), in_dims=1)(VALUES)
    assert torch.equal(gathered[0], VALUES.movedim(1, 0))
    assert torch.equal(slopes, 2 * VALUES.movedim(1, 0))


def test_what_is_the_same_in_all_lanes_is_itself():
    same = torch.ones(3)

    def one_lane(lane):
        assert not in_lane(same) and of_all_lanes(same) is same
        return lane + same

    assert torch.vmap(one_lane)(torch.zeros(2, 3)).tolist() == [[1.0] * 3] * 2
