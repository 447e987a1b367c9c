"""The publish stage: gate, model card, assembled weights and registry."""
