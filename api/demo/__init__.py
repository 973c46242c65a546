"""The demo: a whole EPlane on one machine under shifting traffic, with every returned token checked."""
