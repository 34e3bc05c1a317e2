CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, amount INTEGER);
INSERT INTO orders (customer, amount) VALUES
  ('ada', 10), ('bob', 25), ('ada', 5), ('cy', 40), ('bob', 1), ('ada', 7);
