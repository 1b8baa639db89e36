"""Engine facts of the three pages, and of invalid texts."""

import pytest

from engines.detection import Recognised
from engines.facts import (
    EngineFacts,
    PrefixCounters,
    add_settings,
    describe_engine,
    first_model,
    parse_metrics,
    prefix_counters,
    read_facts,
    settings_pages,
)
from engines.readiness import Target
from engines.vllm import VLLM
from tracefile.records.schema import Engine

METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",num_gpu_blocks="4096",note="a \\"b\\" c"} 1.0
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_queries_total{engine="1"} 20.0
vllm:prefix_cache_queries_created{engine="0"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0"} 64.0
broken{ line
"""
MODELS = '{"data": [{"id": "tiny", "max_model_len": 16384}, {"id": "other"}]}'


def test_vllm_facts() -> None:
    metrics = parse_metrics(METRICS)
    assert describe_engine('{"version": "0.32.0"}', metrics, MODELS) == Engine(
        name="vllm",
        version="0.32.0",
        block_size=32,
        num_gpu_blocks=4096,
        max_model_len=16384,
        enable_prefix_caching=True,
    )
    assert prefix_counters(metrics) == PrefixCounters(queries=120, hits=64)  # summed over engines
    assert first_model(MODELS) == "tiny"


def test_sim_serve_has_a_name_and_vllms_dialect() -> None:
    version = '{"version": "0.1.0", "engine": "kvtape sim"}'
    facts = read_facts(version, METRICS, MODELS)
    assert (facts.engine.name, facts.engine.version, facts.dialect) == ("kvtape sim", "0.1.0", "vllm")
    words = Target("http://h:1", "tiny", Recognised(VLLM, "its metrics are vllm:…"), facts).words()
    assert words[2] == "kvtape sim 0.1.0 (its metrics are vllm:…)"
    assert describe_engine('{"version": "1", "engine": "v1"}', parse_metrics(METRICS), MODELS).name == "vllm"


SERVER_INFO = (
    '{"page_size": 1, "max_total_num_tokens": 60000, "chunked_prefill_size": 4096, "max_running_requests": null, '
    '"disable_radix_cache": false, "version": "0.5.23", "api_key": "secret", "internal_states": [{}]}'
)


def test_sglang_settings() -> None:
    facts = read_facts("", "", '{"data": [{"id": "tiny", "owned_by": "sglang", "max_model_len": 16384}]}')
    assert facts.dialect == "sglang"  # without --enable-metrics
    assert list(settings_pages(facts)) == ["/server_info", "/get_server_info"]
    assert add_settings(facts, SERVER_INFO).engine == Engine(
        name="sglang",
        version="0.5.23",
        block_size=1,
        max_model_len=16384,
        enable_prefix_caching=True,
        extra={"max_total_num_tokens": 60000, "chunked_prefill_size": 4096},
    )
    assert add_settings(facts, "<html>") == facts


@pytest.mark.parametrize(
    ("engine_block", "hashed", "finer"),
    [(None, 16, False), (1, 16, True), (4, 16, True), (8, 8, False), (32, 16, False)],
)
def test_guessable_block_sizes_are_not_adopted(engine_block: int | None, hashed: int, finer: bool) -> None:
    facts = EngineFacts(engine=Engine(block_size=engine_block))
    assert (facts.hash_block_size, facts.is_finer(facts.hash_block_size)) == (hashed, finer)
