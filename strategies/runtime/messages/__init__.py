"""How ranks find each other and talk: groups, transports, mailboxes, agreement before step 1."""
