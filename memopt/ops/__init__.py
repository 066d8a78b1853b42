"""One file per op: schema, reference, fake, autograd, autocast and the public function."""
