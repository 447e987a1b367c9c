"""The caption stage: pictures in, captions by a vision-language model out."""
