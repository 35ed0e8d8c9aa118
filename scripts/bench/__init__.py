"""Speed: contestants, timing, how cost grows with size, and the roofline."""
