"""The LightningModule and the network that it trains."""
