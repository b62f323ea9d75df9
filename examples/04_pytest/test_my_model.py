"""pytest examples/04_pytest --r3-recording=tests/golden/recording"""

import pytest
from model import train


@pytest.mark.r3_layouts("dp=1", "tp=2", "dp=2,cp=2,packing=thd")
def test_my_model_consumes_what_the_engine_chose(r3_step):
    for rank in r3_step.ranks():
        train(rank)
    r3_step.check()


@pytest.mark.r3_layouts("tp=2")
def test_the_same_in_real_processes(r3_ranks):
    r3_ranks(train)
