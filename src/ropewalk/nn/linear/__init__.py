"""Linear attention: the function, the layer, the state and the feature maps."""
