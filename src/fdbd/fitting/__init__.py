"""What training data are boiled down to: mergeable statistics and what drives them."""
