"""What colour_shape is made of: the prompt's grammar, finding objects in an image, naming shapes and colours."""
