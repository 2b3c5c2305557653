"""Linear attention: one family of files per backend; feature maps, segments and tiles."""
