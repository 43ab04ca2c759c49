"""Models of the examples have as many weights as the published ones."""

import pytest
from arrays import count_weights

import deepseek
import llama
import mixtral
import resnet
import segmentation
import simclr

RESNET50 = 25_557_032
PUBLISHED = [
    (llama.llama2_7b, 6_738_415_616),
    (llama.llama3_8b, 8_030_261_248),
    (llama.llama3_70b, 70_553_706_496),
    (llama.llama31_405b, 405_853_388_800),
    (deepseek.deepseek_16b, 15_706_485_888),
    (deepseek.deepseek_671b, 671_026_419_200),
    (mixtral.mixtral_8x7b, 46_702_792_704),
    (resnet.resnet50, RESNET50),
    (
        simclr.simclr,
        RESNET50 - 2049 * 1000 + 2048 * 2048 + 2048 * 128,
    ),  # its encoder without the classifier, and the head
    (lambda: segmentation.cityscapes(classes=21), 35_322_218),  # torchvision's fcn_resnet50, with 21 classes
]


@pytest.mark.parametrize(("make", "weights"), PUBLISHED)
def test_the_size_is_the_published_one(make, weights):
    assert count_weights(make()) == weights
