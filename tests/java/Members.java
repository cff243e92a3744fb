import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentSkipListSet;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.BooleanSupplier;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.NoOffsetForPartitionException;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.OffsetOutOfRangeException;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Java consumers in groups: java Members SCENARIO BOOTSTRAP NAME PROTOCOL. Fails with a reason. */
public final class Members {
    private static final int PARTITIONS = 6;
    private static final int RECORDS = 600;
    private static final int START = 12;
    private static final long PATIENCE_MS = 40_000;

    private final String bootstrap;
    private final String name;
    private final String protocol;
    private final Admin admin;

    private Members(String bootstrap, String name, String protocol) {
        this.bootstrap = bootstrap;
        this.name = name;
        this.protocol = protocol;
        this.admin = Admin.create(Map.of("bootstrap.servers", bootstrap));
    }

    public static void main(String[] arguments) {
        try {
            Members members = new Members(arguments[1], arguments[2], arguments[3]);
            members.admin.createTopics(List.of(new NewTopic(members.name, PARTITIONS, (short) 1))).all().get();
            switch (arguments[0]) {
                case "share" -> members.share();
                case "static" -> members.comeBack();
                case "reset" -> members.reset();
                case "policy" -> members.policy();
                default -> throw new IllegalArgumentException(arguments[0]);
            }
            System.out.println("ok");
            System.exit(0);
        } catch (Throwable failure) {
            failure.printStackTrace();
            System.exit(1);
        }
    }

    private void share() throws Exception {
        Member first = new Member(null);
        Member second = new Member(null);
        Member third = new Member(null);
        await("three share", () -> share(first, second, third));
        fill();
        await("all is read", () -> first.read.get() + second.read.get() + third.read.get() == RECORDS);
        first.close();
        await("two share", () -> share(second, third));
        second.close();
        third.close();
        expect(committed() == RECORDS, committed() + " records are committed");
    }

    private void comeBack() throws Exception {
        Member stays = new Member("stays");
        Member goes = new Member("goes");
        await("two share", () -> share(stays, goes));
        String share = goes.share.toString();
        int moves = stays.moves.get();
        goes.close();
        Member back = new Member("goes");
        await("the share is back", () -> back.share.toString().equals(share));
        expect(stays.moves.get() == moves, "the member that stayed was rebalanced");
        back.close();
        stays.close();
    }

    private void reset() throws Exception {
        fill();
        Member first = new Member(null);
        await("all is read", () -> first.read.get() == RECORDS);
        first.close();
        admin.alterConsumerGroupOffsets(
            name, Map.of(new TopicPartition(name, 0), new OffsetAndMetadata(40))).all().get();
        Member second = new Member(null);
        await("what was reset is read again", () -> second.read.get() == 60);
        second.close();
        admin.deleteConsumerGroupOffsets(name, Set.of(new TopicPartition(name, 1))).all().get();
        expect(committed() == RECORDS - 100, committed() + " records are committed");
        admin.deleteConsumerGroups(List.of(name)).all().get();
    }

    /** Where a group begins that has no offset, or one that is gone, or one that holds. */
    private void policy() throws Exception {
        fill();
        TopicPartition where = new TopicPartition(name, 0);
        admin.deleteRecords(Map.of(where, RecordsToDelete.beforeOffset(START))).all().get();
        for (String reset : List.of("earliest", "latest", "none", "by_duration:PT24H")) {
            for (long committed : new long[] {-1, 3, 20}) {
                String label = reset.replace(':', '-') + " after " + committed;
                String group = name + "-" + label.replace(' ', '-');
                if (committed >= 0) {
                    Map<TopicPartition, OffsetAndMetadata> offsets = Map.of(where, new OffsetAndMetadata(committed));
                    admin.alterConsumerGroupOffsets(group, offsets).all().get();
                }
                String first = first(group, reset, where);
                if (committed == 20) {
                    expect(first.equals("20"), label + ": " + first);
                } else if (reset.equals("none")) {
                    expect(first.equals(committed < 0 ? "no offset" : "out of range"), label + ": " + first);
                } else if (reset.equals("latest")) {
                    expect(Long.parseLong(first) >= RECORDS / PARTITIONS, label + ": " + first);
                } else {
                    expect(first.equals(Integer.toString(START)), label + ": " + first);
                }
            }
        }
    }

    /** The first offset that a group gets, or why it gets none. Whoever begins at the end needs new records. */
    private String first(String group, String reset, TopicPartition where) throws InterruptedException {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("group.id", group);
        settings.put("group.protocol", protocol);
        settings.put("auto.offset.reset", reset);
        settings.put("enable.auto.commit", "false");
        ByteArrayDeserializer bytes = new ByteArrayDeserializer();
        long deadline = System.currentTimeMillis() + PATIENCE_MS;
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings, bytes, bytes)) {
            consumer.assign(List.of(where));
            while (System.currentTimeMillis() < deadline) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(500))) {
                    return Long.toString(record.offset());
                }
                fill();
            }
            return "nothing";
        } catch (NoOffsetForPartitionException none) {
            return "no offset";
        } catch (OffsetOutOfRangeException gone) {
            return "out of range";
        }
    }

    private static boolean share(Member... members) {
        Set<Integer> all = new TreeSet<>();
        for (Member member : members) {
            if (member.share.size() != PARTITIONS / members.length) {
                return false;
            }
            all.addAll(member.share);
        }
        return all.size() == PARTITIONS;
    }

    private void fill() {
        ByteArraySerializer bytes = new ByteArraySerializer();
        try (var producer = new KafkaProducer<>(Map.of("bootstrap.servers", bootstrap), bytes, bytes)) {
            for (int i = 0; i < RECORDS; i++) {
                byte[] value = Integer.toString(i).getBytes(StandardCharsets.UTF_8);
                producer.send(new ProducerRecord<>(name, i % PARTITIONS, null, value));
            }
        }
    }

    private long committed() throws Exception {
        return admin.listConsumerGroupOffsets(name).partitionsToOffsetAndMetadata().get().values().stream()
            .filter(offset -> offset != null).mapToLong(OffsetAndMetadata::offset).sum();
    }

    private static void await(String what, BooleanSupplier holds) throws InterruptedException {
        long deadline = System.currentTimeMillis() + PATIENCE_MS;
        while (!holds.getAsBoolean()) {
            expect(System.currentTimeMillis() < deadline, what + ": not within " + PATIENCE_MS + " ms");
            Thread.sleep(20);
        }
    }

    private static void expect(boolean holds, String otherwise) {
        if (!holds) {
            throw new AssertionError(otherwise);
        }
    }

    /** A consumer in a thread of its own, which commits when it closes. */
    private final class Member implements ConsumerRebalanceListener {
        private final Set<Integer> share = new ConcurrentSkipListSet<>();
        private final AtomicInteger moves = new AtomicInteger();
        private final AtomicInteger read = new AtomicInteger();
        private final AtomicBoolean closing = new AtomicBoolean();
        private final Thread thread;

        private Member(String instance) {
            Properties settings = new Properties();
            settings.put("bootstrap.servers", bootstrap);
            settings.put("group.id", name);
            settings.put("group.protocol", protocol);
            settings.put("auto.offset.reset", "earliest");
            if (protocol.equals("classic")) {
                settings.put("session.timeout.ms", "6000");
                settings.put("heartbeat.interval.ms", "100");
            }
            if (instance != null) {
                settings.put("group.instance.id", instance);
            }
            ByteArrayDeserializer bytes = new ByteArrayDeserializer();
            KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings, bytes, bytes);
            thread = new Thread(() -> poll(consumer));
            thread.start();
        }

        private void poll(KafkaConsumer<byte[], byte[]> consumer) {
            consumer.subscribe(List.of(name), this);
            while (!closing.get()) {
                read.addAndGet(consumer.poll(Duration.ofMillis(20)).count());
            }
            consumer.close();
        }

        private void close() throws InterruptedException {
            closing.set(true);
            thread.join();
        }

        @Override
        public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
            partitions.forEach(partition -> share.add(partition.partition()));
            moves.addAndGet(partitions.size());
        }

        @Override
        public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
            partitions.forEach(partition -> share.remove(partition.partition()));
            moves.addAndGet(partitions.size());
        }
    }
}
