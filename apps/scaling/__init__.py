"""The paper's scaling claims by prediction, and a weak-scaling curve measured here."""
