"""The one local loop, the one server path, and what drives them round by round."""
