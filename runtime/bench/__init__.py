"""Measure a core so that others can check it: raw samples, summaries that anyone can recompute, signatures over both.

    measured = run_decode(core, prompts, concurrency=4, max_tokens=64)
    document = result_document(core, facts, scenarios, settings)
    check_result(document)              # recomputes every summary from the samples
"""
