"""The vocabulary of the queue: values, words and rules that know no other part of it."""
