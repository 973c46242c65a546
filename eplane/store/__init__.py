"""The store seam. Import what you need from `base`; the implementations are `etcd`, `memory`, and `mirror` reads ahead of either."""
