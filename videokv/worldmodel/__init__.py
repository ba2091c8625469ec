"""The world model that is shipped: model, sampler, data, training, weights, evaluation."""
